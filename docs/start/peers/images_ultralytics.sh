yolo classify train data=fruit model=yolo26n-cls.pt epochs=4 imgsz=32 batch=8
yolo classify val model=runs/classify/train/weights/best.pt data=fruit split=test
yolo classify predict model=runs/classify/train/weights/best.pt source=new save_txt=True
